output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id
}

output "arn" {
  description = "The bucket, for policies."
  value       = aws_s3_bucket.this.arn
}
