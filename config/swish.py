# swish with a trained beta per layer (Ramachandran et al. 2017)
#   python train.py config/swish.py
ffn = 'swish'
