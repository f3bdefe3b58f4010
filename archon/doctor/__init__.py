"""What a rank of a layout holds and sends, told without the other ranks: what `archon doctor` prints."""
