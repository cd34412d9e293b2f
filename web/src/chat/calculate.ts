/** The value of an arithmetic expression such as `2 * (3 + sqrt(16))^2`. Raises an Error in words where it is none. */
export function calculate(text: string): number {
  const reader = new Reader(text);
  const value = reader.readSum();
  reader.end();
  return value;
}

const FUNCTIONS: Readonly<Record<string, (...values: number[]) => number>> = {
  abs: Math.abs,
  ceil: Math.ceil,
  cos: Math.cos,
  exp: Math.exp,
  floor: Math.floor,
  ln: Math.log,
  log: Math.log10,
  log2: Math.log2,
  max: Math.max,
  min: Math.min,
  round: Math.round,
  sin: Math.sin,
  sqrt: Math.sqrt,
  tan: Math.tan,
};
const CONSTANTS: Readonly<Record<string, number>> = { e: Math.E, pi: Math.PI };
const TOKEN = /\s*(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|[a-z]\w*|\*\*|[-+*/%^(),])/iy;
const DEEPEST = 200;

class Reader {
  private token: string | null = null;
  private depth = 0;
  private at = 0;

  constructor(private readonly text: string) {
    this.next();
  }

  readSum(): number {
    let value = this.readProduct();
    for (;;) {
      if (this.take("+")) value += this.readProduct();
      else if (this.take("-")) value -= this.readProduct();
      else return value;
    }
  }

  end(): void {
    if (this.token !== null) throw new Error(`“${this.token}” was not expected in “${this.text}”.`);
  }

  private readProduct(): number {
    let value = this.readSigned();
    for (;;) {
      if (this.take("*")) value *= this.readSigned();
      else if (this.take("/")) value /= this.readSigned();
      else if (this.take("%")) value %= this.readSigned();
      else return value;
    }
  }

  private readSigned(): number {
    if (++this.depth > DEEPEST) throw new Error("The expression is nested too deep.");
    const value = this.take("-") ? -this.readSigned() : this.take("+") ? this.readSigned() : this.readPower();
    this.depth -= 1;
    return value;
  }

  private readPower(): number {
    const value = this.readValue();
    return this.take("^") || this.take("**") ? value ** this.readSigned() : value;
  }

  private readValue(): number {
    if (this.take("(")) {
      const value = this.readSum();
      this.expect(")");
      return value;
    }
    const token = this.token;
    if (token === null) throw new Error(`“${this.text}” ends too early.`);
    this.next();
    if (/^[.\d]/.test(token)) return Number(token);
    const name = token.toLowerCase();
    const constant = Object.hasOwn(CONSTANTS, name) ? CONSTANTS[name] : undefined;
    if (constant !== undefined) return constant;
    const call = Object.hasOwn(FUNCTIONS, name) ? FUNCTIONS[name] : undefined;
    if (!call) throw new Error(`“${token}” is not known.`);
    this.expect("(");
    const values = [this.readSum()];
    while (this.take(",")) values.push(this.readSum());
    this.expect(")");
    return call(...values);
  }

  private take(token: string): boolean {
    if (this.token !== token) return false;
    this.next();
    return true;
  }

  private expect(token: string): void {
    if (!this.take(token)) throw new Error(`A “${token}” is missing in “${this.text}”.`);
  }

  private next(): void {
    TOKEN.lastIndex = this.at;
    const found = TOKEN.exec(this.text);
    if (!found && this.text.slice(this.at).trim() !== "") throw new Error(`“${this.text}” is no expression.`);
    this.token = found?.[1] ?? null;
    this.at = found ? TOKEN.lastIndex : this.text.length;
  }
}
