"""Where the protocol state lives: etcd, and a model of it."""
