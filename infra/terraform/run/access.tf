# Access of the nodes by role: the run's own prefix of the store (read-only for generation nodes), the base models, and
# the named secrets.

data "aws_partition" "here" {}
data "aws_caller_identity" "here" {}

locals {
  arn        = "arn:${data.aws_partition.here.partition}"
  bucket     = "${local.arn}:s3:::${var.foundation.bucket}"
  parameters = "${local.arn}:ssm:${var.foundation.region}:${data.aws_caller_identity.here.account_id}:parameter"

  policies = {
    for role in keys(var.nodes) : role => jsonencode({
      Version = "2012-10-17"
      Statement = concat(
        [
          {
            Sid       = "List"
            Effect    = "Allow"
            Action    = ["s3:ListBucket"]
            Resource  = [local.bucket]
            Condition = { StringLike = { "s3:prefix" = ["runs/${var.run}", "runs/${var.run}/*", "models/*"] } }
          },
          {
            Sid      = "Read"
            Effect   = "Allow"
            Action   = ["s3:GetObject"]
            Resource = ["${local.bucket}/runs/${var.run}/*", "${local.bucket}/models/*"]
          },
        ],
        [for writer in ["trainer"] : {
          Sid      = "Write"
          Effect   = "Allow"
          Action   = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
          Resource = ["${local.bucket}/runs/${var.run}/*", "${local.bucket}/.probe-*"] # probe of write access
        } if role == writer],
        [for secrets in [values(var.secrets)] : {
          Sid      = "Secrets"
          Effect   = "Allow"
          Action   = ["ssm:GetParameters"]
          Resource = [for parameter in secrets : "${local.parameters}${parameter}"]
        } if length(secrets) > 0],
        [for key in var.foundation.kms_key_arn[*] : {
          Sid      = "Encryption"
          Effect   = "Allow"
          Action   = role == "trainer" ? ["kms:Decrypt", "kms:GenerateDataKey"] : ["kms:Decrypt"]
          Resource = [key]
        }],
      )
    })
  }
}
