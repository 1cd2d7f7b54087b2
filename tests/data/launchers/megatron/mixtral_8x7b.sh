# sizes of the example, degrees that its README recommends for training: TP1 EP8 PP4
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
--group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights --position-embedding-type rope \
--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
--tokenizer-type Llama2Tokenizer --seq-length 4096 --bf16 --micro-batch-size 1 --global-batch-size 256 \
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer \
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
