# Creates no resource: `terraform test` needs a root module in this folder.

terraform {
  required_version = ">= 1.10"
}
