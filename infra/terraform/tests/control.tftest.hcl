# Tests the plan of the control machine, without a cloud.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  name          = "areal"
  image         = "ami-0123456789abcdef0"
  instance_type = "t3.large"
  disk_gib      = 50
  bucket        = { name = "areal-test", arn = "arn:aws:s3:::areal-test" }
  secrets       = { prefect = "/areal/prefect-auth", mlflow = "/areal/mlflow-password" }
  software      = { path = "/opt/areal", install = "echo here" }

  network = {
    vpc_id      = "vpc-1"
    cidr        = "10.64.0.0/20"
    subnet_id   = "subnet-1"
    subnet_cidr = "10.64.0.0/23"
    zone        = "us-east-1a"
  }
}

run "reached_from_the_network_of_the_nodes_alone" {
  module {
    source = "./modules/control"
  }

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_ingress_rule.servers : rule.cidr_ipv4 == "10.64.0.0/20" && rule.from_port == rule.to_port])
    error_message = "others reach the servers"
  }
  assert {
    condition     = toset([for rule in aws_vpc_security_group_ingress_rule.servers : rule.from_port]) == toset([4200, 5000])
    error_message = "other ports are open"
  }
  assert {
    condition     = !aws_instance.this.associate_public_ip_address && aws_instance.this.private_ip == "10.64.0.10"
    error_message = "address: ${jsonencode(aws_instance.this.private_ip)}"
  }
  assert {
    condition     = output.prefect_api_url == "http://10.64.0.10:4200/api"
    error_message = "Prefect: ${output.prefect_api_url}"
  }
}

run "its_disk_outlives_it" {
  module {
    source = "./modules/control"
  }

  assert {
    condition     = aws_ebs_volume.state.encrypted && aws_ebs_volume.state.final_snapshot
    error_message = "the database would be lost, or readable"
  }
  assert {
    condition     = aws_volume_attachment.state.instance_id == aws_instance.this.id
    error_message = "the disk is not the machine's"
  }
}

run "it_reads_its_own_secrets_alone" {
  module {
    source = "./modules/control"
  }

  assert {
    condition = one([for statement in jsondecode(aws_iam_role_policy.this.policy).Statement : toset(statement.Resource) if statement.Sid == "Secrets"]) == toset([
      "arn:aws:ssm:us-east-1:123456789012:parameter/areal/prefect-auth",
      "arn:aws:ssm:us-east-1:123456789012:parameter/areal/mlflow-password",
    ])
    error_message = "policy: ${aws_iam_role_policy.this.policy}"
  }
}
