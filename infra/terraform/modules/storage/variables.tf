variable "bucket" {
  description = "Name of the bucket, globally unique."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket: must be 3 to 63 lowercase letters, digits and hyphens."
  }
}

variable "noncurrent_days" {
  description = "Days for which deleted or replaced objects can be restored."
  type        = number
  default     = 7

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "noncurrent_days: must be a whole number of at least 1."
  }
}

variable "kms_key_arn" {
  description = "Your KMS key for the encryption of objects; null: S3's own key."
  type        = string
  default     = null
}
