"""The environment variables in which common clients look for the endpoint."""

_VARIABLES = {
    # Forewarn's client and agent, and Azure's Python sample
    "SCHEDULEDEVENTSIP": "{address}",
    # azure-scheduledevents-manager
    "AZURE_SCHEDULEDEVENTS_URL": "http://{address}/metadata/scheduledevents?api-version=2019-08-01",
    "AZURE_METADATAINSTANCE_URL": "http://{address}/metadata/instance?api-version=2019-08-01",
}


def make_environment(url: str) -> dict[str, str]:
    """Return the variables that point a client at the endpoint at `url`."""
    address = url.removeprefix("http://")
    return {name: value.format(address=address) for name, value in _VARIABLES.items()}
