"""The tracker's HTTP surface: JSON, server-sent events, a page, health and metrics."""
