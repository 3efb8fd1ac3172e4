"""What all of Horovod's framework modules share."""
