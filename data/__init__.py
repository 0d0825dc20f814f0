""" Text as token ids: how they are read, and how each dataset is made. """
