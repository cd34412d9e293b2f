const K1 = 1.2;
const B = 0.75;
/** Scripts that put no spaces between words are compared by pairs of letters. */
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}]/u;

/** The words of a text as they are compared: in lower case, without accents. */
export function listWords(text: string): string[] {
  const plain = text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  return (plain.match(/[\p{L}\p{N}]+/gu) ?? []).flatMap((word) => (UNSPACED.test(word) ? listPairs(word) : [word]));
}

function listPairs(word: string): string[] {
  const letters = [...word];
  return letters.length < 2 ? letters : letters.slice(1).map((letter, index) => `${letters[index]}${letter}`);
}

/** How well each text answers a question by the words that both have (BM25); 0 where they share none. */
export function scoreWords(texts: readonly string[], question: string): Float32Array {
  const scores = new Float32Array(texts.length);
  const wanted = new Set(listWords(question));
  if (wanted.size === 0 || texts.length === 0) return scores;
  const counts = new Map<string, Map<number, number>>([...wanted].map((word) => [word, new Map()]));
  const lengths = texts.map((text, index) => {
    const words = listWords(text);
    for (const word of words) {
      const found = counts.get(word);
      found?.set(index, (found.get(index) ?? 0) + 1);
    }
    return words.length;
  });
  const usual = Math.max(1, lengths.reduce((sum, length) => sum + length, 0) / texts.length);
  for (const found of counts.values()) {
    const weight = Math.log(1 + (texts.length - found.size + 0.5) / (found.size + 0.5));
    for (const [index, count] of found) {
      const share = K1 * (1 - B + (B * (lengths[index] ?? 0)) / usual);
      scores[index] = (scores[index] ?? 0) + (weight * count * (K1 + 1)) / (count + share);
    }
  }
  return scores;
}
