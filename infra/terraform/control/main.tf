# Resources that outlive runs: the nodes' network, the store, and a machine with Prefect's server and MLflow. The state
# is a local file, because no store exists before the first apply. Keep the file.

terraform {
  required_version = ">= 1.10"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  backend "local" {} # `make control` sets the path
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { "areal:control" = var.name }
  }
}

module "network" {
  source = "../modules/network"
  name   = var.name
  cidr   = var.cidr
  zones  = var.zones
}

module "storage" {
  source          = "../modules/storage"
  bucket          = var.bucket
  noncurrent_days = var.noncurrent_days
  kms_key_arn     = var.kms_key_arn
}

module "control" {
  source        = "../modules/control"
  name          = var.name
  image         = var.image
  instance_type = var.instance_type
  disk_gib      = var.disk_gib
  secrets       = var.secrets
  software      = var.software
  bucket        = { name = module.storage.bucket, arn = module.storage.arn }
  kms_key_arn   = var.kms_key_arn

  network = {
    vpc_id      = module.network.vpc_id
    cidr        = var.cidr
    subnet_id   = module.network.subnets[var.zones[0]]
    subnet_cidr = module.network.cidrs[var.zones[0]]
    zone        = var.zones[0]
  }
}
