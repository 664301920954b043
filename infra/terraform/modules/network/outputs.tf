output "vpc_id" {
  description = "Id of the network's VPC."
  value       = aws_vpc.this.id
}

output "subnets" {
  description = "Ids of the private subnets, by availability zone."
  value       = { for zone, subnet in aws_subnet.nodes : zone => subnet.id }

  depends_on = [aws_route.nodes, aws_route_table_association.nodes] # wait until the subnets have a route out
}

output "cidrs" {
  description = "Address ranges of the private subnets, by availability zone."
  value       = { for zone, subnet in aws_subnet.nodes : zone => subnet.cidr_block }
}
