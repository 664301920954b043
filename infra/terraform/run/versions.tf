terraform {
  required_version = ">= 1.10"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  # Bucket, key and region are given to `terraform init`: a state for each run, which one process writes at a time.
  backend "s3" {
    use_lockfile = true
    encrypt      = true
  }
}

provider "aws" {
  region = var.foundation.region

  default_tags {
    tags = local.tags
  }
}
