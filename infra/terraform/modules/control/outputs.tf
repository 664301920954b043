output "prefect_api_url" {
  description = "Address of Prefect's API for nodes."
  value       = "http://${local.address}:4200/api"
}

output "mlflow_url" {
  description = "Address of MLflow for nodes."
  value       = "http://${local.address}:5000"
}

output "instance_id" {
  description = "Id of the control machine, for a tunnel."
  value       = aws_instance.this.id
}
