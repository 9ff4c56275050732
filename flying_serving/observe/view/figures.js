/* The four figures above all, each with what it was while this page has been open. */

const KEPT_POINTS = 200;
const points = { ttft: [], tpot: [], tokens: [], pool: [] };

function spark(article, values) {
  const [area, line] = article.querySelectorAll("path");
  const known = values.map((value, i) => [KEPT_POINTS - values.length + i, value]).filter(([, value]) => value !== null);
  if (known.length < 2) {
    area.removeAttribute("d");
    line.removeAttribute("d");
    return;
  }
  const most = Math.max(...known.map(([, value]) => value)) || 1;
  const path = known.map(([i, value]) => `${i} ${(1 - value / most) * 38 + 1}`).join("L");
  article.querySelector("svg").setAttribute("viewBox", `0 0 ${KEPT_POINTS} 40`);
  article.querySelector("svg").setAttribute("preserveAspectRatio", "none");
  line.setAttribute("d", `M${path}`);
  area.setAttribute("d", `M${known[0][0]} 40L${path}L${known.at(-1)[0]} 40Z`);
}

function figure(id, value, text, unit, small) {
  const article = one(id), kept = points[id];
  kept.push(value);
  if (kept.length > KEPT_POINTS) kept.shift();
  write(article.querySelector("b"), text);
  write(article.querySelector("i"), unit);
  write(article.querySelector("small"), small);
  spark(article, kept);
}

function inTime(id, ms, small) {
  const inSeconds = ms !== null && ms >= 999.5;
  figure(id, ms, short(inSeconds ? ms / 1000 : ms), inSeconds ? "s" : "ms", small);
}

function drawFigures(state) {
  const { rolling, pool } = state;
  inTime("ttft", rolling.ttft_mean_ms, `P90 ${lasting(rolling.ttft_p90_ms)}`);
  inTime("tpot", rolling.tpot_mean_ms, `longest gap ${lasting(rolling.worst_gap_ms)}`);
  const { tokens_per_s } = rolling;
  figure("tokens", tokens_per_s, short(tokens_per_s), "tokens/s", `${state.running} requests run`);
  const waits = [];
  if (pool.requests) waits.push(`oldest ${lasting(pool.oldest_s * 1000)}`);
  if (pool.urgent) waits.push(`${pool.urgent} urgent`);
  if (pool.requests) waits.push(`${short(pool.prompt_tokens)} prompt tokens`);
  figure("pool", pool.requests, String(pool.requests), "waiting", waits.join(", ") || "nothing waits");
}
