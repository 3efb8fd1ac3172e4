"""What distributed training does, written once for all frameworks: no ML library is imported here."""
