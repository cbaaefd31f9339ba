"""The lab: the service with a clock, ids, faults and a transcript of one's own. Nothing is implemented twice."""
