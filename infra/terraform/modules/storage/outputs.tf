output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id
}

output "arn" {
  description = "ARN of the bucket, for policies."
  value       = aws_s3_bucket.this.arn
}
