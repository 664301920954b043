output "hosts" {
  description = "The nodes."
  value = [for name, node in aws_instance.node : {
    name    = name
    role    = var.role
    address = node.private_ip
    id      = node.id
    type    = var.instance_type
    spot    = var.spot
  }]
}
