# Values of the mocked provider, where a generated value would be invalid.

mock_data "aws_partition" {
  defaults = { partition = "aws" }
}
mock_data "aws_region" {
  defaults = { name = "us-east-1" }
}
mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}
mock_data "aws_ec2_instance_type" {
  defaults = { efa_supported = true, efa_maximum_interfaces = 4 }
}
mock_data "aws_ami" {
  defaults = { root_device_name = "/dev/xvda" }
}
mock_resource "aws_iam_instance_profile" {
  defaults = { arn = "arn:aws:iam::123456789012:instance-profile/node" }
}
mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0" }
}
mock_resource "aws_s3_bucket" {
  defaults = { arn = "arn:aws:s3:::areal-test" }
}
