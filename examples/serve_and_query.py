"""Start a server with the OpenAI API, ask it, and end it.

python examples/serve_and_query.py runs/start --prompt "12+34="

It listens on this machine only, and needs no key.
"""

import argparse
import subprocess
import sys
import time

import httpx
from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("--prompt", default="12+34=")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()

url = f"http://127.0.0.1:{options.port}"
server = subprocess.Popen([sys.executable, "-m", "archon", "serve", options.checkpoint, "--port", str(options.port)])
try:
    while True:  # until the model is loaded
        if server.poll() is not None:
            sys.exit(f"the server ended with code {server.returncode}")
        try:
            if httpx.get(f"{url}/health").is_success:
                break
        except httpx.ConnectError:
            time.sleep(0.2)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt=options.prompt, max_tokens=8, temperature=0)
    print(f"{options.prompt}{answer.choices[0].text}")
finally:
    server.terminate()
    server.wait()
