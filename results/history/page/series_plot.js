// Draws a series: plotSeries(series, view, size) makes an SVG of its values over the runs of `view`.

// Makes an element of HTML, or of SVG where the name begins with "svg:". Children are nodes or texts.
function make(name, attributes = {}, ...children) {
  const element = name.startsWith('svg:') ? document.createElementNS('http://www.w3.org/2000/svg', name.slice(4)) :
      document.createElement(name);
  Object.entries(attributes).forEach(([key, value]) => { if (value !== undefined) element.setAttribute(key, value); });
  element.append(...children);
  return element;
}

const significant = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const UNITS = {
  absolute_time: [['ns', 1], ['µs', 1e3], ['ms', 1e6], ['s', 1e9]],
  memory: [['B', 1], ['KiB', 2 ** 10], ['MiB', 2 ** 20], ['GiB', 2 ** 30], ['TiB', 2 ** 40]],
};
const unitOf = (metric, value) =>
    (UNITS[metric] || [['', 1]]).filter(([, size], i) => i === 0 || size <= Math.abs(value)).pop();
// Formats a value as the tables do, 0.184, 4.33 MiB, 1.2e-7, timeout, in the unit of `scale`.
function formatValue(metric, value, statuses, scale = value) {
  if (metric === 'status') return statuses[value] || String(value);
  if (Number.isNaN(value)) return 'nan';
  if (!Number.isFinite(value)) return value > 0 ? 'inf' : '-inf';
  if (value === 0) return '0';
  if ((!UNITS[metric] && Math.abs(value) < 1e-3) || Math.abs(value) >= 1e15) return value.toExponential(1).replace('+', '').replace('.0e', 'e');
  const [unit, size] = unitOf(metric, scale);
  const digits = metric.startsWith('error') ? 2 : 3;
  return significant(value / size, digits) + (unit ? ' ' + unit : '');
}

// Returns about `count` round numbers between two ends.
function ticksBetween(metric, low, high, count, logarithmic) {
  if (logarithmic && high / low > 8) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((last - first) / count));
    const steps = high / low < 80 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let power = first; power <= last; power += every) steps.forEach((step) => ticks.push(step * 10 ** power));
    return ticks.filter((tick) => tick >= low && tick <= high);
  }
  const size = unitOf(metric, high)[1];
  const rough = (high - low) / size / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power * size;
  const ticks = [];
  if (!(step > 0) || !Number.isFinite(step)) return ticks;
  for (let i = Math.ceil(low / step); i * step <= high; ++i) ticks.push(i * step);
  return ticks;
}

// Returns the ends of the vertical axis, and whether it is logarithmic. Of many values, one in forty on either side may lie
// beyond it, but not the latest; it is then marked at the edge. The axis spans at least 8 %, so that a series without noise
// looks like one.
function verticalRange(series, items) {
  const sorted = (key) => items.map((item) => item[key]).filter(Number.isFinite).sort((a, b) => a - b);
  const at = (values, share) => values[Math.round(share * (values.length - 1))];
  const values = sorted('value');
  if (values.length === 0) return {low: 0, high: 1, logarithmic: false};
  const levels = series.changes.flatMap((change) => [change.before, change.after]).concat(series.level).filter(Number.isFinite);
  const trim = values.length > 40 ? 0.025 : 0;
  const latest = items[items.length - 1].value;
  if (Number.isFinite(latest)) levels.push(latest);
  const limited = (value) => Math.min(Math.max(value, -1e150), 1e150);
  const low = limited(Math.min(at(values, trim), at(sorted('low'), 0.1), ...levels));
  const high = limited(Math.max(at(values, 1 - trim), at(sorted('high'), 0.9), ...levels));
  if (low > 0) {
    const least = Math.max(low, 1e-150);
    const middle = Math.sqrt(least * high), half = Math.max(Math.sqrt(high / least) ** 1.16, 1.04);
    return {low: middle / half, high: middle * half, logarithmic: true};
  }
  const pad = (high / 2 - low / 2) * 0.16 || Math.abs(high) * 0.04 || 1;
  return {low: low - (low === 0 ? 0 : pad), high: high + pad, logarithmic: false};
}

// What marks a change of each kind; see ranking.h.
const KINDS = [
  {name: 'regression', text: 'regression', up: true},
  {name: 'acknowledged', text: 'acknowledged regression', up: true},
  {name: 'recovered', text: 'recovered', up: true},
  {name: 'improvement', text: 'improvement', up: false},
  {name: 'uncounted', text: 'worse, but no regression', up: true},
];

// `series` has changes, level, bound, metric, and what decodeSeries returns; `view` the first run
// and one past the last; `size` the width, height and margins, and whether it is large. Returns the
// SVG; `points`, of the items in view with their place on it; and point(i), which sets the cursor.
function plotSeries(series, view, size, {statuses, dateOf}) {
  const {width, height, left, right, top, bottom, large} = size;
  const {runs} = series;
  const x = (run) => left + (run + 0.5 - view.from) / Math.max(view.to - view.from, 1) * (width - left - right);
  const within = (run) => Math.round(10 * Math.min(Math.max(x(run), left), width - right)) / 10;
  const last = (item) => runs[item.first + item.count - 1];
  const items = series.items.filter((item) => last(item) >= view.from && runs[item.first] < view.to);
  const round = (number) => Math.round(number * 10) / 10;
  const root = make('svg:svg', {class: 'plot', viewBox: `0 0 ${width} ${height}`});
  const path = (name, d) => { if (d) root.append(make('svg:path', {class: name, d})); };
  const label = (name, at, height, anchor, text) =>
      root.append(make('svg:text', {class: name, x: round(at), y: round(height), 'text-anchor': anchor}, text));
  const floor = height - bottom;
  // A bar over the runs of both ends and those between.
  const bar = (first, end, above, below) =>
      `M${within(first - 0.5)} ${round(above)}H${within(end + 0.5)}V${round(below)}H${within(first - 0.5)}Z`;

  let y;
  if (series.metric === 'status') {
    // A row for each status that occurs.
    const rows = Array.from(new Set(items.map((item) => item.value))).sort((a, b) => a - b);
    const row = Math.min((floor - top) / Math.max(rows.length, 1), large ? 40 : 22);
    const base = (floor + top + rows.length * row) / 2;
    y = (value) => base - (rows.indexOf(value) + 0.5) * row;
    rows.forEach((value) => {
      label('tick', left - 5, y(value) + 3.5, 'end', formatValue('status', value, statuses));
      let d = '';
      items.filter((item) => item.value === value).forEach((item) => {
        d += bar(runs[item.first], last(item), y(value) - row * 0.32, y(value) + row * 0.32);
      });
      path(value === 0 ? 'strip fine' : 'strip', d);
    });
  } else {
    const {low, high, logarithmic} = verticalRange(series, items);
    const scaled = logarithmic ? Math.log : (value) => value;
    const scale = (value) => (scaled(value) - scaled(low)) / (scaled(high) - scaled(low));
    y = (value) => floor - Math.min(Math.max(value <= 0 && logarithmic ? 0 : scale(value), 0), 1) * (floor - top);
    ticksBetween(series.metric, low, high, large ? 6 : 2.5, logarithmic).forEach((tick) => {
      path('grid', `M${left} ${round(y(tick))}H${width - right}`);
      label('tick', left - 4, y(tick) + 3.5, 'end', formatValue(series.metric, tick, statuses, high));
    });
    drawValues(low, high);
  }

  function drawValues(low, high) {
    let band = '', line = '', beyond = '', odd = '', dots = '', whiskers = '';
    // The band of a group is cut where it is much taller than others, and a thin line goes on to its end: most often that is
    // one run of many.
    const groups = items.filter((item) => item.count > 1 && Number.isFinite(item.value));
    const usual = (key) =>
        groups.map((item) => Math.abs(y(item[key]) - y(item.value))).sort((a, b) => a - b)[groups.length >> 1];
    const [above, below] = [usual('high'), usual('low')];
    const ends = ({value, low: least, high: greatest}) => [
      y(value) - y(greatest) > 3 * above + 2 ? y(value) - above : y(greatest),
      y(least) - y(value) > 3 * below + 2 ? y(value) + below : y(least),
    ];
    let end = -2;  // the run that the line has come to
    items.forEach((item) => {
      const from = runs[item.first], to = last(item), middle = round((within(from) + within(to)) / 2);
      if (item.odd > 0) odd += `M${middle - 2.5} ${top - 3}l5 5m0 -5l-5 5`;
      if (!Number.isFinite(item.value)) {
        end = -2;
        return;
      }
      const [highest, lowest] = ends(item);
      if (highest > y(item.high)) whiskers += `M${middle} ${round(highest)}V${round(y(item.high))}`;
      if (lowest < y(item.low)) whiskers += `M${middle} ${round(lowest)}V${round(y(item.low))}`;
      // A group covers the runs that have a value; there may be gaps between them.
      for (let i = item.first, begin = from; item.count > 1 && i < item.first + item.count; ++i) {
        if (i + 1 < item.first + item.count && runs[i + 1] === runs[i] + 1) continue;
        band += bar(begin, runs[i], highest, lowest);
        begin = runs[i + 1];
      }
      if (item.count === 1 && (item.value > high || item.value < low)) {
        const up = item.value > high;
        beyond += `M${round(middle - 2.5)} ${up ? top + 3 : floor - 3}h5l-2.5 ${up ? -5 : 5}Z`;
      }
      line += from === end + 1 ? `L${middle} ${round(y(item.value))}` : `M${middle} ${round(y(item.value))}h0`;
      dots += `M${middle} ${round(y(item.value))}h0`;
      end = to;
    });
    path('band', band);
    path('whiskers', whiskers);
    path('values', line);
    if (items.length <= (large ? 160 : 40)) path('dots', dots);
    if (series.bound > low && series.bound < high) path('bound', `M${left} ${round(y(series.bound))}H${width - right}`);
    path('beyond', beyond);
    path('odd', odd);
  }

  // The levels, and the changes between them.
  const isInView = (begin, end) => runs[end - 1] >= view.from && runs[begin] < view.to;
  const drawLevel = (name, value, begin, end) => {
    if (series.metric === 'status' || !Number.isFinite(value) || end <= begin || !isInView(begin, end)) return;
    path(name, `M${within(runs[begin] - 0.5)} ${round(y(value))}H${within(runs[end - 1] + 0.5)}`);
  };
  if (series.changes.length === 0) drawLevel('level', series.level, 0, runs.length);
  series.changes.forEach((change) => {
    drawLevel('level', change.before, change.begin, change.at);
    drawLevel(`level ${KINDS[change.kind].name}`, change.after, change.at, change.end);
  });
  const changes = series.changes.filter((change) => runs[change.at] >= view.from && runs[change.at] < view.to);
  const placeOf = (change) => round(x(runs[change.at] - 0.5));
  const taken = [];  // what labels cover of the line above the plot
  [...changes].sort((a, b) => a.kind - b.kind || b.at - a.at).forEach((change) => {
        const kind = KINDS[change.kind], at = placeOf(change);
        path(`change ${kind.name}`, `M${at} ${top}V${floor}`);
        path(`glyph ${kind.name}`, kind.up ? `M${at - 4} ${top}h8l-4 -7Z` : `M${at - 4} ${top - 7}h8l-4 7Z`);
        if (!large && series.changes.length === 1) return;  // the panel's heading says it
        const length = 8 + 6.6 * change.size.length, after = at + length < width;
        const [begin, end] = after ? [at - 5, at + length] : [at - length, at + 5];
        const glyphs = changes.filter((other) => other !== change)
            .map((other) => [placeOf(other) - 5, placeOf(other) + 5]);
        if (taken.concat(glyphs).some(([a, b]) => begin < b && end > a)) return;
        taken.push([begin, end]);
        label(`size ${kind.name}`, after ? at + 6 : at - 6, top - 1, after ? 'start' : 'end', change.size);
      });

  // Dates, where they have room.
  const count = large ? Math.max(2, Math.floor(width / 150)) : 2;
  for (let i = 0; i < count && view.to > view.from; ++i) {
    const run = Math.round(view.from + i / (count - 1) * (view.to - 1 - view.from));
    const anchor = i === 0 ? 'start' : i === count - 1 ? 'end' : 'middle';
    if (i > 0 && view.to - view.from < count) continue;
    label('tick', i === 0 ? left : i === count - 1 ? width - right : x(run), height - 3, anchor, dateOf(run));
  }
  path('frame', `M${left} ${floor}H${width - right}`);

  const cursor = make('svg:g', {class: 'cursor', visibility: 'hidden'},
      make('svg:path', {d: `M0 ${top}V${floor}`}), make('svg:circle', {r: large ? 4 : 3}));
  root.append(cursor);
  const points = items.map((item) => ({
    item,
    x: (within(runs[item.first]) + within(last(item))) / 2,
    y: Number.isFinite(item.value) ? y(item.value) : top,
  }));
  const point = (i) => {
    cursor.setAttribute('visibility', points[i] ? 'visible' : 'hidden');
    if (points[i]) cursor.setAttribute('transform', `translate(${round(points[i].x)} 0)`);
    if (points[i]) cursor.lastChild.setAttribute('cy', round(points[i].y));
  };
  return {root, points, point};
}
