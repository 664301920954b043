output "foundation" {
  description = "Values that the root module `run` needs: region, network, subnets, store."
  value = {
    region      = var.region
    vpc_id      = module.network.vpc_id
    subnets     = module.network.subnets
    bucket      = module.storage.bucket
    kms_key_arn = var.kms_key_arn
  }
}

output "prefect_api_url" {
  description = "Address of Prefect's API for nodes."
  value       = module.control.prefect_api_url
}

output "mlflow_url" {
  description = "Address of MLflow for nodes."
  value       = module.control.mlflow_url
}

output "tunnels" {
  description = "Commands that forward Prefect's page to http://127.0.0.1:4200 and MLflow's to http://127.0.0.1:5000."
  value = [
    for port in [4200, 5000] : join(" ", [
      "aws ssm start-session --region ${var.region} --target ${module.control.instance_id}",
      "--document-name AWS-StartPortForwardingSession --parameters portNumber=${port},localPortNumber=${port}",
    ])
  ]
}
