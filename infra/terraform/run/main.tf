# The nodes of one run, their network rules and their access. `terraform destroy` removes all of it; the run's stored
# files are in the bucket of the root module `control`.

locals {
  tags = {
    "areal:run"     = var.run
    "areal:owner"   = var.lease.owner
    "areal:expires" = var.lease.expires_at
  }

  # AWS instance types by number and kind of GPUs.
  types = {
    "0xnone"    = "m7i.2xlarge"
    "1xt4"      = "g4dn.4xlarge"
    "1xa10g"    = "g5.4xlarge"
    "4xa10g"    = "g5.24xlarge"
    "8xa10g"    = "g5.48xlarge"
    "1xl4"      = "g6.4xlarge"
    "4xl4"      = "g6.24xlarge"
    "8xl4"      = "g6.48xlarge"
    "1xl40s"    = "g6e.4xlarge"
    "4xl40s"    = "g6e.24xlarge"
    "8xl40s"    = "g6e.48xlarge"
    "8xa100-40" = "p4d.24xlarge"
    "8xa100-80" = "p4de.24xlarge"
    "1xh100"    = "p5.4xlarge"
    "8xh100"    = "p5.48xlarge"
    "8xh200"    = "p5en.48xlarge"
  }

  zone      = coalesce(var.zone, sort(keys(var.foundation.subnets))[0])
  subnet_id = var.foundation.subnets[local.zone]
}

# Traffic between the run's nodes, and to the outside.
resource "aws_security_group" "nodes" {
  name        = "areal-${var.run}"
  description = "Nodes of run ${var.run}: each other, and outwards."
  vpc_id      = var.foundation.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
  description                  = "From nodes of the same run."
}

# EFA's traffic is not IP: both rules must name the security group.
resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
  description                  = "To nodes of the same run."
}

resource "aws_vpc_security_group_egress_rule" "outwards" {
  #checkov:skip=CKV_AWS_382:Nodes connect to Prefect, MLflow, the store and package indexes, whose addresses are not known in advance.
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  description       = "To Prefect, MLflow, the store and package indexes."
}

module "nodes" {
  source   = "../modules/gpu_pool"
  for_each = var.nodes

  run           = var.run
  role          = each.key
  epoch         = var.epoch
  nodes         = each.value.count
  instance_type = local.types["${each.value.gpus}x${each.value.gpu}"]
  image         = var.image
  disk_gib      = each.value.disk_gib
  spot          = each.value.spot
  max_price     = each.value.max_price
  efa           = var.fast_network
  policy        = local.policies[each.key]
  expires_at    = var.lease.expires_at
  software      = var.software
  tags          = local.tags

  network = {
    subnet_id       = local.subnet_id
    zone            = local.zone
    security_groups = [aws_security_group.nodes.id]
  }

  node = {
    run         = var.run
    role        = each.key
    region      = var.foundation.region
    expires_at  = var.lease.expires_at
    prefect     = merge(var.prefect, { work_queue = "${var.run}-${each.key}" })
    environment = var.environment
    secrets     = var.secrets
  }
}
