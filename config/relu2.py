# relu(x W1)^2 W2 (So et al. 2021)
#   python train.py config/relu2.py
ffn = 'relu2'
