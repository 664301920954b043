# Nodes of one role: one launch template, and one instance resource per node. So the next apply recreates a reclaimed
# node under its name, and a bad node is replaced without the others.

locals {
  name  = "areal-${var.run}-${var.role}"
  once  = "${local.name}-${var.epoch}"
  nodes = toset([for number in range(var.nodes) : "${var.role}-${number}"])
  efa   = var.efa && data.aws_ec2_instance_type.this.efa_supported
  cards = local.efa ? data.aws_ec2_instance_type.this.efa_maximum_interfaces : 1
  user_data = templatefile("${path.module}/user_data.sh.tftpl", {
    run        = var.run
    role       = var.role
    expires_at = var.expires_at
    node       = jsonencode(var.node)
    path       = var.software.path
    install    = base64encode(var.software.install)
  })
}

data "aws_ec2_instance_type" "this" {
  instance_type = var.instance_type
}

data "aws_ami" "this" {
  filter {
    name   = "image-id"
    values = [var.image]
  }
}

# An existing role keeps its name, although the epoch in it has changed; so do the profile and placement group below.
resource "aws_iam_role" "node" {
  name = local.once
  tags = var.tags

  lifecycle {
    ignore_changes = [name]
  }

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "node" {
  name   = "run"
  role   = aws_iam_role.node.id
  policy = var.policy
}

resource "aws_iam_instance_profile" "node" {
  name = local.once
  role = aws_iam_role.node.name
  tags = var.tags

  lifecycle {
    ignore_changes = [name]
  }
}

# Places nodes close together if their type has EFA.
resource "aws_placement_group" "this" {
  count = local.efa ? 1 : 0

  name     = local.once
  strategy = "cluster"
  tags     = var.tags

  lifecycle {
    ignore_changes = [name]
  }
}

resource "aws_launch_template" "node" {
  name                                 = local.name
  image_id                             = var.image
  instance_type                        = var.instance_type
  instance_initiated_shutdown_behavior = "terminate"
  update_default_version               = true
  user_data                            = base64encode(local.user_data)
  tags                                 = var.tags

  iam_instance_profile {
    arn = aws_iam_instance_profile.node.arn
  }

  # Version 2 only: a forged request from a process of the node can't obtain the node's credentials.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = false # detailed monitoring costs extra for each instance; the run measures more
  }

  placement {
    availability_zone = var.network.zone
    group_name        = one(aws_placement_group.this[*].name)
  }

  dynamic "instance_market_options" {
    for_each = var.spot ? [var.max_price] : []

    content {
      market_type = "spot"

      spot_options {
        spot_instance_type             = "one-time"
        instance_interruption_behavior = "terminate"
        max_price                      = instance_market_options.value == null ? null : tostring(instance_market_options.value)
      }
    }
  }

  # With EFA, one interface per network card; the first has the node's address.
  dynamic "network_interfaces" {
    for_each = range(local.cards)

    content {
      network_card_index          = network_interfaces.value
      device_index                = network_interfaces.value == 0 ? 0 : 1
      interface_type              = !local.efa ? null : network_interfaces.value == 0 ? "efa" : "efa-only"
      subnet_id                   = var.network.subnet_id
      security_groups             = var.network.security_groups
      associate_public_ip_address = local.cards == 1 ? false : null
      delete_on_termination       = true
    }
  }

  block_device_mappings {
    device_name = data.aws_ami.this.root_device_name

    ebs {
      volume_size           = var.disk_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = var.tags
    }
  }
}

resource "aws_instance" "node" {
  for_each = local.nodes

  #checkov:skip=CKV_AWS_8:The launch template encrypts the disk.
  #checkov:skip=CKV_AWS_79:The launch template requires version 2 of the metadata service.
  #checkov:skip=CKV_AWS_126:Detailed monitoring costs extra for each instance; the run measures more.
  #checkov:skip=CKV_AWS_135:GPU instance types are always EBS-optimised.
  #checkov:skip=CKV2_AWS_41:The launch template names the role.
  tags        = merge(var.tags, { Name = "areal-${var.run}-${each.key}", "areal:node" = each.key })
  volume_tags = var.tags

  launch_template {
    id      = aws_launch_template.node.id
    version = aws_launch_template.node.latest_version
  }

  # A running node keeps its launch settings. A new expiry or a newer checkout applies only to nodes that start after the
  # change.
  lifecycle {
    ignore_changes = [launch_template[0].version]
  }

  depends_on = [aws_iam_role_policy.node]
}
