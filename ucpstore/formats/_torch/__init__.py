"""Parts of `ucpstore.formats.torchfile`: the pickle machine, its allow-list, and the two containers."""
