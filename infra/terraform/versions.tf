# Nothing is made from here: `terraform test` takes the folder of all parts for a root module.

terraform {
  required_version = ">= 1.10"
}
