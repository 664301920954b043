terraform {
  required_version = ">= 1.10"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  # `terraform init` gets bucket, key and region. Each run has its own state, which one process writes at a time.
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
