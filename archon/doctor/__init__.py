"""What `archon doctor` prints: what a rank of a layout holds and sends, and what is wrong on real ranks."""
