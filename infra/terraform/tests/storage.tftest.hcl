# Tests the plan of the store, without a cloud.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  bucket = "areal-test"
}

run "versioned_encrypted_and_closed" {
  module {
    source = "./modules/storage"
  }

  assert {
    condition     = aws_s3_bucket_versioning.this.versioning_configuration[0].status == "Enabled"
    error_message = "what is deleted by mistake could not be brought back"
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "objects are not encrypted"
  }
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this.block_public_acls,
      aws_s3_bucket_public_access_block.this.block_public_policy,
      aws_s3_bucket_public_access_block.this.ignore_public_acls,
      aws_s3_bucket_public_access_block.this.restrict_public_buckets,
    ])
    error_message = "the bucket could be made public"
  }
  assert {
    condition     = aws_s3_bucket.this.force_destroy != true
    error_message = "a bucket that holds something would be deleted"
  }
  assert {
    condition     = one(jsondecode(aws_s3_bucket_policy.this.policy).Statement).Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "the bucket takes requests that are not encrypted"
  }
  assert {
    condition     = one(one(aws_s3_bucket_lifecycle_configuration.this.rule).abort_incomplete_multipart_upload).days_after_initiation == 1
    error_message = "parts that killed writers leave would cost for ever"
  }
}

run "with_a_key_of_ones_own" {
  module {
    source = "./modules/storage"
  }

  variables {
    kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/k"
  }

  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).sse_algorithm == "aws:kms"
    error_message = "the key is not used"
  }
}

run "a_name_that_no_bucket_can_have" {
  command = plan

  module {
    source = "./modules/storage"
  }

  variables {
    bucket = "Areal_Test"
  }

  expect_failures = [var.bucket]
}
