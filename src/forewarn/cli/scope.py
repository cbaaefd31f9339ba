"""`forewarn scope`: the delivery groups."""

from forewarn.cli.resource import noun

COLUMNS = ("name", "kind", "vms", "events", "incarnation", "is_enabled", "seen_at")

app = noun("scope", "Scopes, the groups of VMs that share one document: list, show.", COLUMNS)
