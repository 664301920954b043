# Tests a run's access rules, network rules and refused settings, without a cloud.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  run = "cpu-async-0123456789ab"
  nodes = {
    generation = { count = 2, gpu = "l4", gpus = 1, spot = true, max_price = 1.5 }
    trainer    = { count = 1 }
  }
  lease      = { owner = "somebody@example.org", expires_at = "2030-01-31T12:00:00Z" }
  prefect    = { api_url = "http://10.64.0.5:4200/api", work_pool = "areal-nodes" }
  image      = "ami-0123456789abcdef0"
  foundation = { region = "us-east-1", vpc_id = "vpc-1", subnets = { us-east-1a = "subnet-1", us-east-1b = "subnet-2" }, bucket = "areal-test" }
}

run "hosts" {
  module {
    source = "./run"
  }

  assert {
    condition = { for host in output.hosts : host.name => [host.role, host.type, host.spot] } == {
      generation-0 = ["generation", "g6.4xlarge", true]
      generation-1 = ["generation", "g6.4xlarge", true]
      trainer-0    = ["trainer", "p5.48xlarge", false]
    }
    error_message = "hosts: ${jsonencode(output.hosts)}"
  }
}

run "nodes_are_reached_by_nodes_of_the_run_alone" {
  module {
    source = "./run"
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.nodes.referenced_security_group_id == aws_security_group.nodes.id && aws_vpc_security_group_ingress_rule.nodes.cidr_ipv4 == null
    error_message = "others reach the nodes"
  }
}

run "a_node_that_generates_only_reads" {
  module {
    source = "./run"
  }

  assert {
    condition     = toset(flatten(jsondecode(local.policies["generation"]).Statement[*].Action)) == toset(["s3:ListBucket", "s3:GetObject"])
    error_message = "policy: ${local.policies["generation"]}"
  }
  assert {
    condition = alltrue([
      for statement in jsondecode(local.policies["trainer"]).Statement :
      statement.Resource == ["arn:aws:s3:::areal-test/runs/${var.run}/*", "arn:aws:s3:::areal-test/.probe-*"] if statement.Sid == "Write"
    ])
    error_message = "policy: ${local.policies["trainer"]}"
  }
}

run "secrets_are_named_and_nothing_else_is_read" {
  module {
    source = "./run"
  }

  variables {
    secrets = { PREFECT_API_AUTH_STRING = "/areal/prefect-auth" }
  }

  assert {
    condition     = one([for statement in jsondecode(local.policies["generation"]).Statement : statement.Resource if statement.Sid == "Secrets"]) == ["arn:aws:ssm:us-east-1:123456789012:parameter/areal/prefect-auth"]
    error_message = "policy: ${local.policies["generation"]}"
  }
}

run "a_role_that_there_is_not" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    nodes = { rollout = { count = 1 } }
  }

  expect_failures = [var.nodes]
}

run "a_machine_that_there_is_not" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    nodes = { trainer = { count = 1, gpu = "h100", gpus = 5 } }
  }

  expect_failures = [var.nodes]
}

run "a_price_limit_on_demand" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    nodes = { trainer = { count = 1, max_price = 3 } }
  }

  expect_failures = [var.nodes]
}

run "an_expiry_without_a_time_zone" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    lease = { owner = "somebody", expires_at = "2030-01-31 12:00" }
  }

  expect_failures = [var.lease]
}

run "a_run_id_that_tells_too_much" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    run = "Run; shutdown now"
  }

  expect_failures = [var.run]
}

run "credentials_in_an_address" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    prefect = { api_url = "http://user:password@10.64.0.5:4200/api", work_pool = "areal-nodes" }
  }

  expect_failures = [var.prefect]
}

run "a_secret_in_the_environment" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    environment = { MLFLOW_TRACKING_PASSWORD = "hunter2" }
  }

  expect_failures = [var.environment]
}

run "a_secret_where_its_name_should_be" {
  command = plan

  module {
    source = "./run"
  }

  variables {
    secrets = { MLFLOW_TRACKING_PASSWORD = "hunter2" }
  }

  expect_failures = [var.secrets]
}
