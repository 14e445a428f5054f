"""The ladder: five algorithms, one small file each, all a call of ``update`` with an A of their own."""
