"""How ranks meet and talk: groups over torch.distributed, lanes, the world."""
