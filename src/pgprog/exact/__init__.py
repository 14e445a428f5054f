"""Truth by enumeration: what others estimate is computed, on a task small enough."""
