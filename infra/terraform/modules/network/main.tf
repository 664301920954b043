# One network for all runs. Nodes are in private subnets: they connect out through one NAT gateway, and nothing outside
# can connect to them. Traffic to the store uses an S3 gateway endpoint, which has no charge per byte.

data "aws_region" "here" {}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:Flow logs cost extra, and nothing here is reachable from outside. Security groups control the connections.
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# The default security group lets nothing through, so a forgotten security group is safe.
resource "aws_default_security_group" "closed" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-closed" }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.name }
}

# Subnet of the NAT gateway only.
resource "aws_subnet" "outward" {
  vpc_id                  = aws_vpc.this.id
  cidr_block              = cidrsubnet(var.cidr, 4, 15)
  availability_zone       = var.zones[0]
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-outward" }
}

resource "aws_route_table" "outward" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-outward" }
}

resource "aws_route" "outward" {
  route_table_id         = aws_route_table.outward.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "outward" {
  subnet_id      = aws_subnet.outward.id
  route_table_id = aws_route_table.outward.id
}

resource "aws_eip" "nat" {
  domain = "vpc"
  tags   = { Name = "${var.name}-nat" }
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.outward.id
  tags          = { Name = var.name }

  depends_on = [aws_internet_gateway.this]
}

resource "aws_subnet" "nodes" {
  for_each = { for place, zone in var.zones : zone => place }

  vpc_id                  = aws_vpc.this.id
  cidr_block              = cidrsubnet(var.cidr, 3, each.value)
  availability_zone       = each.key
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-${each.key}" }
}

resource "aws_route_table" "nodes" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-nodes" }
}

resource "aws_route" "nodes" {
  route_table_id         = aws_route_table.nodes.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this.id
}

resource "aws_route_table_association" "nodes" {
  for_each = aws_subnet.nodes

  subnet_id      = each.value.id
  route_table_id = aws_route_table.nodes.id
}

resource "aws_vpc_endpoint" "store" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.here.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.nodes.id]
  tags              = { Name = "${var.name}-store" }
}
