'use strict';

// Reads the text of a series (series_text.h). decodeSeries(text) returns
//   runs    the run of each value, by index into the machine's runs
//   items   {first, count, value, low, high, odd}: `count` values from place `first` on, of which
//           `odd` are not finite; their median, least and greatest value
//   exact   whether all values are kept as they were
const DIGITS = Array.from({length: 94}, (_, i) => 33 + i).filter((code) => !'"&\'<>\\'.includes(String.fromCharCode(code)));
const DIGIT_OF = new Uint8Array(127);
DIGITS.forEach((code, digit) => { DIGIT_OF[code] = digit; });
const LOG_STEP = 2 * Math.log1p(0.001);

function decodeSeries(text) {
  let at = 0;
  const digit = () => DIGIT_OF[text.charCodeAt(at++)];
  const digits = (count, n = 0) => {
    for (; count > 0; --count) n = n * 88 + digit();
    return n;
  };
  const unsigned = () => {
    const first = digit();
    if (first < 60) return first;
    if (first < 80) return 60 + digits(1, first - 60);
    return first < 86 ? 1820 + digits(2, first - 80) : digits(5);
  };
  const signed = () => {
    const n = unsigned();
    return n % 2 === 0 ? n / 2 : -(n + 1) / 2;
  };

  const runs = [];
  for (let ranges = unsigned(), end = 0; ranges > 0; --ranges) {
    let run = end + unsigned();
    for (end = run + unsigned(); run < end; ++run) runs.push(run);
  }
  const items = [];
  const one = (first, value) => items.push({first, count: 1, value, low: value, high: value, odd: Number.isFinite(value) ? 0 : 1});

  if (digit() === 0) {
    const values = Array.from({length: unsigned()}, () => {
      const end = text.indexOf(' ', at);
      const value = Number(text.slice(at, end));
      at = end + 1;
      return value;
    });
    while (items.length < runs.length) {
      const value = values.length > 1 ? values[unsigned()] : values[0];
      for (let count = values.length > 1 ? unsigned() : runs.length; count > 0; --count) one(items.length, value);
    }
    return {runs, items, exact: true};
  }

  let prediction = 0, quantised = 0;
  const valueOf = (code) => Math.min(Math.exp(code * LOG_STEP), Number.MAX_VALUE);
  // Reads a value; `quantised` is then its code where it is positive, else the reference.
  const near = (reference) => {
    quantised = reference;
    if (DIGIT_OF[text.charCodeAt(at)] !== 87) {
      quantised += signed();
      return valueOf(quantised);
    }
    at += 1;
    const special = digit();
    return special < 4 ? [0, NaN, Infinity, -Infinity][special] : -valueOf(reference + signed());
  };
  const next = () => {
    const value = near(prediction);
    prediction += Math.floor((quantised - prediction) / 4);
    return value;
  };
  const blocks = Array.from({length: unsigned()}, () => ({size: unsigned(), groups: unsigned()}));
  let first = 0;
  blocks.forEach(({size, groups}) => {
    for (let i = 0; i < groups; ++i) {
      const begin = Math.floor(i * size / groups), count = Math.floor((i + 1) * size / groups) - begin;
      let odd = 0;
      if (DIGIT_OF[text.charCodeAt(at)] === 87 && DIGIT_OF[text.charCodeAt(at + 1)] === 5) {
        at += 2;
        odd = unsigned();
      }
      if (odd === count) {
        items.push({first: first + begin, count, value: NaN, low: NaN, high: NaN, odd});
        continue;
      }
      const value = next(), reference = value > 0 ? quantised : prediction;
      items.push({first: first + begin, count, value, low: near(reference), high: near(reference), odd});
    }
    for (let i = 0; groups === 0 && i < size; ++i) one(first + i, next());
    first += size;
  });
  return {runs, items, exact: false};
}
