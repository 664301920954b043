"""Calls of AWS's API: which one a request is, and what AWS makes of one that moto doesn't.

- RunInstances with a launch template: moto takes some of what the template says. The rest is put into the request.
- TerminateInstances of one that is terminated: moto looks for its interface, and refuses.
- A call with a `ClientToken` that has been carried out is not carried out again: the first answer comes back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from botocore.exceptions import ClientError

_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request")  # of a signature
TERMINATED = "InvalidNetworkInterfaceID.NotFound"  # moto's refusal
_FORM = "application/x-www-form-urlencoded"
_TEMPLATE = "LaunchTemplate."
# Of a template's interfaces, by what the request calls it.
_INTERFACE = {
    "DeviceIndex": "DeviceIndex",
    "SubnetId": "SubnetId",
    "AssociatePublicIpAddress": "AssociatePublicIpAddress",
    "DeleteOnTermination": "DeleteOnTermination",
    "InterfaceType": "InterfaceType",
    "NetworkCardIndex": "NetworkCardIndex",
}

Describe = Callable[..., Mapping[str, Any]]  # DescribeLaunchTemplateVersions


@dataclass(frozen=True)
class Call:
    service: str  # ec2, iam, sts, s3, ssm
    name: str  # RunInstances, CreateRole, GetParameters; of S3 the request, as "PUT /bucket/key"
    fields: Mapping[str, str]  # of those that come as a form

    @property
    def reads(self) -> bool:
        """It changes nothing of EC2's."""
        return self.service != "ec2" or self.name.startswith(("Describe", "Get"))


def call_of(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Call:
    """Which call a request is. `path` has its query; `headers` are found in whatever case."""
    scope = _SCOPE.search(headers.get("Authorization", ""))
    service = scope[1] if scope else "s3"
    if target := headers.get("X-Amz-Target"):
        return Call(service, target.rpartition(".")[2], {})
    if headers.get("Content-Type", "").startswith(_FORM):
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True))
        return Call(service, fields.get("Action", ""), fields)
    return Call(service, f"{method} {urlsplit(path).path}", {})


def with_template(call: Call, describe: Describe) -> bytes | None:
    """The body of a RunInstances that says itself what its launch template says; None where nothing is to be added."""
    named = {field: call.fields.get(_TEMPLATE + field) for field in ("LaunchTemplateId", "LaunchTemplateName")}
    asked = {field: value for field, value in named.items() if value}
    if call.name != "RunInstances" or not asked:
        return None
    version = call.fields.get(f"{_TEMPLATE}Version") or "$Default"
    try:
        (found,) = describe(**asked, Versions=[version])["LaunchTemplateVersions"]
    except ClientError:  # there is none: moto says so, as AWS does
        return None
    added = _of_template(found["LaunchTemplateData"])
    kinds = {field.partition(".")[0] for field in call.fields}
    if "SubnetId" in kinds:
        kinds.add("NetworkInterface")
    fresh = {field: value for field, value in added.items() if field.partition(".")[0] not in kinds}
    return urlencode({**call.fields, **fresh}).encode()


def each_terminated(call: Call) -> dict[str, bytes]:
    """The bodies of calls that terminate one instance each, by its id."""
    ids = [value for field, value in call.fields.items() if field.startswith("InstanceId.")]
    rest = {field: value for field, value in call.fields.items() if not field.startswith("InstanceId.")}
    return {instance: urlencode({**rest, "InstanceId.1": instance}).encode() for instance in ids}


def terminated(instances: Iterable[str]) -> bytes:
    """The answer to TerminateInstances."""
    state = "<code>32</code><name>shutting-down</name>"
    items = "".join(
        f"<item><instanceId>{instance}</instanceId><currentState>{state}</currentState>"
        f"<previousState>{state}</previousState></item>"
        for instance in instances
    )
    return f"<TerminateInstancesResponse><instancesSet>{items}</instancesSet></TerminateInstancesResponse>".encode()


def _of_template(data: Mapping[str, Any]) -> dict[str, str]:
    """Fields of RunInstances that moto leaves in the template."""
    fields: dict[str, Any] = {"InstanceInitiatedShutdownBehavior": data.get("InstanceInitiatedShutdownBehavior")}
    fields |= {f"IamInstanceProfile.{key}": value for key, value in data.get("IamInstanceProfile", {}).items()}
    fields |= {f"MetadataOptions.{key}": value for key, value in data.get("MetadataOptions", {}).items()}
    fields["Placement.AvailabilityZone"] = data.get("Placement", {}).get("AvailabilityZone")
    fields["InstanceMarketOptions.MarketType"] = data.get("InstanceMarketOptions", {}).get("MarketType")
    for number, interface in enumerate(data.get("NetworkInterfaces", []), 1):
        start = f"NetworkInterface.{number}."
        fields |= {start + _INTERFACE[key]: value for key, value in interface.items() if key in _INTERFACE}
        groups = enumerate(interface.get("Groups", []), 1)
        fields |= {f"{start}SecurityGroupId.{place}": group for place, group in groups}
    return {field: _text(value) for field, value in fields.items() if value is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
