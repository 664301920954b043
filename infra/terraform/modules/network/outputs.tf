output "vpc_id" {
  description = "The network."
  value       = aws_vpc.this.id
}

output "subnets" {
  description = "Private subnets, by availability zone."
  value       = { for zone, subnet in aws_subnet.nodes : zone => subnet.id }

  depends_on = [aws_route.nodes, aws_route_table_association.nodes] # what is in there can reach out
}

output "cidrs" {
  description = "Addresses of the private subnets, by availability zone."
  value       = { for zone, subnet in aws_subnet.nodes : zone => subnet.cidr_block }
}
