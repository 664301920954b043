# A small machine with Prefect's server, MLflow and their Postgres, at a fixed address. The database is on a disk that
# outlives the machine. Nodes connect to the two servers directly. Users connect through a Session Manager tunnel, as no
# port is open to the internet.

locals {
  address = cidrhost(var.network.subnet_cidr, 10) # AWS reserves the first addresses
  state   = "/srv/areal"
  arn     = "arn:${data.aws_partition.here.partition}"
  ssm     = "${local.arn}:ssm:${data.aws_region.here.name}:${data.aws_caller_identity.here.account_id}:parameter"

  told = {
    address        = local.address
    state          = local.state
    artifacts      = "s3://${var.bucket.name}/mlflow"
    region         = data.aws_region.here.name
    prefect_secret = var.secrets.prefect
    mlflow_secret  = var.secrets.mlflow
  }
}

data "aws_partition" "here" {}
data "aws_region" "here" {}
data "aws_caller_identity" "here" {}

resource "aws_security_group" "this" {
  name        = "${var.name}-control"
  description = "Prefect and MLflow: from the network of the nodes, and outwards."
  vpc_id      = var.network.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "servers" {
  for_each = { prefect = 4200, mlflow = 5000 }

  security_group_id = aws_security_group.this.id
  cidr_ipv4         = var.network.cidr
  ip_protocol       = "tcp"
  from_port         = each.value
  to_port           = each.value
  description       = "From nodes to ${each.key}."
}

resource "aws_vpc_security_group_egress_rule" "outwards" {
  #checkov:skip=CKV_AWS_382:The machine connects to the store, SSM and package indexes, whose addresses are not known in advance.
  security_group_id = aws_security_group.this.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  description       = "To the store, parameters, the Session Manager and package indexes."
}

resource "aws_iam_role" "this" {
  name = "${var.name}-control"

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "this" {
  name = "control"
  role = aws_iam_role.this.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid      = "Secrets"
          Effect   = "Allow"
          Action   = ["ssm:GetParameters"]
          Resource = [for parameter in values(var.secrets) : "${local.ssm}${parameter}"]
        },
        {
          Sid       = "List"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = [var.bucket.arn]
          Condition = { StringLike = { "s3:prefix" = ["mlflow", "mlflow/*"] } }
        },
        {
          Sid      = "Artifacts"
          Effect   = "Allow"
          Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
          Resource = ["${var.bucket.arn}/mlflow/*"]
        },
      ],
      [for key in var.kms_key_arn[*] : {
        Sid      = "Encryption"
        Effect   = "Allow"
        Action   = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource = [key]
      }],
    )
  })
}

# The tunnel through which users open the pages.
resource "aws_iam_role_policy_attachment" "sessions" {
  role       = aws_iam_role.this.name
  policy_arn = "${local.arn}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "this" {
  name = "${var.name}-control"
  role = aws_iam_role.this.name
}

resource "aws_ebs_volume" "state" {
  #checkov:skip=CKV_AWS_189:Encrypted with the EBS default key; it holds only the data of the pages.
  availability_zone = var.network.zone
  size              = var.disk_gib
  type              = "gp3"
  encrypted         = true
  final_snapshot    = true
  tags              = { Name = "${var.name}-control" }
}

resource "aws_instance" "this" {
  #checkov:skip=CKV_AWS_126:Detailed monitoring costs extra for each instance and is of no use here.
  ami                         = var.image
  instance_type               = var.instance_type
  subnet_id                   = var.network.subnet_id
  private_ip                  = local.address
  associate_public_ip_address = false
  vpc_security_group_ids      = [aws_security_group.this.id]
  iam_instance_profile        = aws_iam_instance_profile.this.name
  ebs_optimized               = true
  user_data_replace_on_change = true
  tags                        = { Name = "${var.name}-control" }

  user_data = templatefile("${path.module}/user_data.sh.tftpl", {
    name    = var.name
    volume  = replace(aws_ebs_volume.state.id, "-", "")
    state   = local.state
    told    = jsonencode(local.told)
    path    = var.software.path
    install = base64encode(var.software.install)
  })

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_size = 30
    volume_type = "gp3"
    encrypted   = true
  }

  depends_on = [aws_iam_role_policy.this]
}

resource "aws_volume_attachment" "state" {
  device_name                    = "/dev/sdf"
  volume_id                      = aws_ebs_volume.state.id
  instance_id                    = aws_instance.this.id
  stop_instance_before_detaching = true
}
