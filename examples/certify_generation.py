"""Answer from a quarter of the KV cache and say how far that may have moved attention.

python -m examples.certify_generation MODEL        a folder or a hub name of a decoder with full attention
"""

import pydoc_data.topics
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from cert.hf import certified
from cert.policy import Policy

if len(sys.argv) != 2:
    sys.exit(__doc__)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = pydoc_data.topics.topics["typesseq"] + "\n\nQuestion: are tuples mutable?\nAnswer:"
ids = tokenizer(text, return_tensors="pt").input_ids[:, -min(2000, model.config.max_position_embeddings // 2) :]

with certified(model, Policy.preset("certified", budget=0.25)) as session:
    out = model.generate(ids, max_new_tokens=24, do_sample=False)
    summary = session.summary()
    print("answer      ", repr(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    print("certificate ", f"{summary['certificate']['value']:.3f} of the attention output, mean over layers")
    print("cache       ", f"{summary['prefix_bytes_before']} -> {summary['prefix_bytes_after']} bytes of prompt")
    if summary["certificate"]["value"] > 0.1:
        again = session.escalate(budget=0.5)
        print("at 50 %     ", f"{session.summary()['certificate']['value']:.3f}, same coins")
    print("full cache  ", "the same answer" if out.equal(session.recompute()) else "another answer")
