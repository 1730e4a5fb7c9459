// Two programs side by side. Lines are numbers, equal where they are equal; a function defines every name once, so the
// lines that both have are put in order first (the longest common increasing run), then, between them, the lines that
// define the same name, or open or end a function, which have changed. Gives [left, right] positions, -1 where one side has nothing.

function align(a, b) {
  const rows = [];
  walk(anchors(a, b, (id) => id), 0, 0, a.length, b.length, (i0, j0, i1, j1) => {
    const left = a.slice(i0, i1), right = b.slice(j0, j1);
    const same = anchors(left, right, (id) => namesOf(id)[0] ?? /^\s*(def|return)\b/.exec(lines.text[id])?.[0]);
    walk(same, 0, 0, left.length, right.length, (p0, q0, p1, q1) => {
      for (let p = p0; p < p1; p++) rows.push([i0 + p, -1]);
      for (let q = q0; q < q1; q++) rows.push([-1, j0 + q]);
    }, (p, q) => rows.push([i0 + p, j0 + q]));
  }, (i, j) => rows.push([i, j]));
  return rows;
}

// Visits the gaps between pairs and the pairs, in order.
function walk(pairs, i, j, endA, endB, gap, pair) {
  for (const [p, q] of pairs) {
    gap(i, j, p, q);
    pair(p, q);
    [i, j] = [p + 1, q + 1];
  }
  gap(i, j, endA, endB);
}

// Pairs of positions with equal keys, in an order both sides share, as many as possible. What stands in several functions
// is paired in turn: the first with the first.
function anchors(a, b, key) {
  const places = (list) => {
    const at = new Map(), seen = new Map();
    list.forEach((id, i) => {
      const k = key(id);
      if (k === undefined) return;
      seen.set(k, (seen.get(k) ?? 0) + 1);
      at.set(`${k} ${seen.get(k)}`, i);
    });
    return at;
  };
  const left = places(a), right = places(b), pairs = [];
  for (const [k, i] of left) if (right.has(k)) pairs.push([i, right.get(k)]);
  pairs.sort((x, y) => x[0] - y[0]);
  return increasing(pairs);
}

function increasing(pairs) {
  const tails = [], previous = new Array(pairs.length).fill(-1);
  pairs.forEach(([, j], n) => {
    let low = 0, high = tails.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[tails[middle]][1] < j) low = middle + 1; else high = middle;
    }
    if (low > 0) previous[n] = tails[low - 1];
    tails[low] = n;
  });
  const found = [];
  for (let n = tails.length ? tails[tails.length - 1] : -1; n >= 0; n = previous[n]) found.push(pairs[n]);
  return found.reverse();
}

// Where two texts differ, after what they share at both ends.
function difference(a, b) {
  let start = 0, end = 0;
  while (start < a.length && a[start] === b[start]) start++;
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  return [start, end];
}
