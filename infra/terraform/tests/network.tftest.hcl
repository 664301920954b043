# Tests the plan of the network, without a cloud.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  name  = "areal"
  zones = ["us-east-1a", "us-east-1b"]
}

run "nodes_are_reached_by_nobody_from_outside" {
  module {
    source = "./modules/network"
  }

  assert {
    condition     = alltrue([for subnet in aws_subnet.nodes : !subnet.map_public_ip_on_launch])
    error_message = "a node would have a public address"
  }
  assert {
    condition     = aws_route.nodes.gateway_id == null
    error_message = "nodes have a route that leads in as well as out"
  }
  assert {
    condition     = try(length(aws_default_security_group.closed.ingress), 0) + try(length(aws_default_security_group.closed.egress), 0) == 0
    error_message = "the default security group lets something through"
  }
}

run "subnets_do_not_overlap" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    cidr  = "10.1.0.0/24"
    zones = [for letter in ["a", "b", "c", "d", "e", "f"] : "us-east-1${letter}"]
  }

  assert {
    condition = sort(concat([for subnet in aws_subnet.nodes : subnet.cidr_block], [aws_subnet.outward.cidr_block])) == sort([
      "10.1.0.0/27", "10.1.0.32/27", "10.1.0.64/27", "10.1.0.96/27", "10.1.0.128/27", "10.1.0.160/27", "10.1.0.240/28",
    ])
    error_message = "subnets: ${jsonencode([for subnet in aws_subnet.nodes : subnet.cidr_block])}"
  }
}

run "a_network_that_is_too_small" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    cidr = "10.1.0.0/25"
  }

  expect_failures = [var.cidr]
}

run "a_zone_twice" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    zones = ["us-east-1a", "us-east-1a"]
  }

  expect_failures = [var.zones]
}
