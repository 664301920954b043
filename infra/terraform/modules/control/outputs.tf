output "prefect_api_url" {
  description = "Prefect's API, for nodes."
  value       = "http://${local.address}:4200/api"
}

output "mlflow_url" {
  description = "MLflow, for nodes."
  value       = "http://${local.address}:5000"
}

output "instance_id" {
  description = "The machine, for a tunnel to it."
  value       = aws_instance.this.id
}
