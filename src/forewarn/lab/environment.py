"""The environment variables in which common clients look for the endpoint."""

_VARIABLES = {
    # Forewarn's client and agent
    "FOREWARN_ENDPOINT": "http://{address}",
    # Azure's Python sample, and the same
    "SCHEDULEDEVENTSIP": "{address}",
    # azure-scheduledevents-manager
    "AZURE_SCHEDULEDEVENTS_URL": "http://{address}/metadata/scheduledevents?api-version=2019-08-01",
    "AZURE_METADATAINSTANCE_URL": "http://{address}/metadata/instance?api-version=2019-08-01",
}


def make_environment(url: str, vm: str = "") -> dict[str, str]:
    """Return the variables that point a client at the endpoint at `url`.

    A program that plays a VM gets its name too.
    """
    address = url.removeprefix("http://")
    variables = {name: value.format(address=address) for name, value in _VARIABLES.items()}
    return {**variables, "FOREWARN_VM": vm} if vm else variables
