# Tests the plan of one role's nodes, without a cloud.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  run           = "cpu-async-0123456789ab"
  role          = "generation"
  nodes         = 2
  instance_type = "p4d.24xlarge"
  image         = "ami-0123456789abcdef0"
  disk_gib      = 200
  spot          = false
  efa           = false
  policy        = "{\"Version\": \"2012-10-17\", \"Statement\": []}"
  expires_at    = "2030-01-31T12:00:00Z"
  tags          = { "areal:run" = "cpu-async-0123456789ab", "areal:owner" = "somebody", "areal:expires" = "2030-01-31T12:00:00Z" }

  network  = { subnet_id = "subnet-1", zone = "us-east-1a", security_groups = ["sg-1"] }
  node     = { run = "cpu-async-0123456789ab", role = "generation" }
  software = { path = "/opt/areal", install = "echo here" }
}

run "on_demand" {
  module {
    source = "./modules/gpu_pool"
  }

  assert {
    condition     = [for host in output.hosts : host.name] == ["generation-0", "generation-1"]
    error_message = "nodes: ${jsonencode(output.hosts)}"
  }
  assert {
    condition     = aws_launch_template.node.instance_initiated_shutdown_behavior == "terminate"
    error_message = "a node that shuts itself down would be stopped, and its disk paid for"
  }
  assert {
    condition     = aws_launch_template.node.metadata_options[0].http_tokens == "required"
    error_message = "the node's credentials could be had by a forged request"
  }
  assert {
    condition     = aws_launch_template.node.network_interfaces[0].associate_public_ip_address == "false"
    error_message = "nodes would have public addresses"
  }
  assert {
    condition     = tobool(aws_launch_template.node.block_device_mappings[0].ebs[0].encrypted) && aws_launch_template.node.block_device_mappings[0].device_name == "/dev/xvda"
    error_message = "disks are not encrypted, or another one than the system's is"
  }
  assert {
    condition     = length(aws_launch_template.node.instance_market_options) == 0 && length(aws_placement_group.this) == 0
    error_message = "neither spot nor a placement group was asked for"
  }
  assert {
    condition = alltrue([
      for tags in concat([for node in aws_instance.node : node.tags], [for node in aws_instance.node : node.volume_tags], aws_launch_template.node.tag_specifications[*].tags) :
      tags["areal:run"] == var.run && tags["areal:owner"] == "somebody" && tags["areal:expires"] == var.expires_at
    ])
    error_message = "something does not carry run, owner and expiry"
  }
}

run "the_first_thing_that_a_node_does_is_to_set_its_end" {
  module {
    source = "./modules/gpu_pool"
  }

  assert {
    condition     = strcontains(split("node.json <<", base64decode(aws_launch_template.node.user_data))[0], "\n\"$boot/areal-1-end\"\n")
    error_message = "user data: ${base64decode(aws_launch_template.node.user_data)}"
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.node.user_data), "date -d '2030-01-31T12:00:00Z'")
    error_message = "user data: ${base64decode(aws_launch_template.node.user_data)}"
  }
}

run "spot_with_a_limit" {
  module {
    source = "./modules/gpu_pool"
  }

  variables {
    spot      = true
    max_price = 12.5
  }

  assert {
    condition     = aws_launch_template.node.instance_market_options[0].spot_options[0].max_price == "12.5"
    error_message = "the limit: ${jsonencode(aws_launch_template.node.instance_market_options)}"
  }
  assert {
    condition     = aws_launch_template.node.instance_market_options[0].spot_options[0].instance_interruption_behavior == "terminate"
    error_message = "a reclaimed node would be stopped, and its disk paid for"
  }
}

run "with_the_network_between_gpus" {
  module {
    source = "./modules/gpu_pool"
  }

  variables {
    efa   = true
    epoch = "0a1b2c"
  }

  assert {
    condition     = aws_placement_group.this[0].name == "areal-${var.run}-generation-0a1b2c"
    error_message = "what AWS deletes by name alone must have a name that is given once: ${aws_placement_group.this[0].name}"
  }
  assert {
    condition     = toset([aws_iam_role.node.name, aws_iam_instance_profile.node.name]) == toset(["areal-${var.run}-generation-000000"])
    error_message = "what was made under an earlier lease must keep its name: ${aws_iam_role.node.name}"
  }

  assert {
    condition     = aws_launch_template.node.network_interfaces[*].interface_type == tolist(["efa", "efa-only", "efa-only", "efa-only"])
    error_message = "interfaces: ${jsonencode(aws_launch_template.node.network_interfaces[*].interface_type)}"
  }
  assert {
    condition     = aws_launch_template.node.network_interfaces[*].device_index == tolist([0, 1, 1, 1])
    error_message = "interfaces: ${jsonencode(aws_launch_template.node.network_interfaces[*].device_index)}"
  }
  assert {
    condition     = aws_placement_group.this[0].strategy == "cluster" && aws_launch_template.node.placement[0].group_name == aws_placement_group.this[0].name
    error_message = "nodes are not side by side"
  }
}
