"""The JetStream adapter: the only place of Millstream that imports nats."""
