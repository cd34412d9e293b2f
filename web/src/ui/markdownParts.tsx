import { ExternalLink } from "lucide-react";
import { Children, isValidElement, type ReactNode } from "react";
import type { Components } from "react-markdown";
import { Citations } from "./Citation";
import { CodeBlock } from "./CodeBlock";
import { Diagram } from "./Diagram";
import styles from "./Markdown.module.css";

/** The address of a link or an image if it is a web page or a mail address; "" otherwise. */
export function readAddress(address: string): string {
  return /^(?:https?:\/\/|mailto:)/i.test(address) ? address : "";
}

/** How the parts of an answer's Markdown are drawn. Headings begin below those of the page. */
export const COMPONENTS: Components = {
  a: ({ href, children }) => (href ? <OutsideLink href={href}>{children}</OutsideLink> : children),
  img: ({ src, alt }) =>
    typeof src === "string" && src ? (
      <OutsideLink href={src}>Image: {alt || src}</OutsideLink>
    ) : (
      `[Image: ${alt ?? ""}]`
    ),
  pre: ({ children }) => <Pre>{children}</Pre>,
  h1: ({ children, dir }) => <h3 dir={dir}>{children}</h3>,
  h2: ({ children, dir }) => <h4 dir={dir}>{children}</h4>,
  h3: ({ children, dir }) => <h5 dir={dir}>{children}</h5>,
  h4: ({ children, dir }) => <h6 dir={dir}>{children}</h6>,
  h5: ({ children, dir }) => <h6 dir={dir}>{children}</h6>,
  table: ({ children, dir }) => (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a wide table is scrolled with the keyboard.
    <section className={styles.table} aria-label="Table" tabIndex={0}>
      <table dir={dir}>{children}</table>
    </section>
  ),
  cite: ({ node }) => <Citations numbers={String(node?.properties.numbers)} />,
  input: ({ checked }) => <input type="checkbox" checked={checked ?? false} disabled aria-label="Done" />,
};

function OutsideLink({ href, children }: { href: string; children: ReactNode }) {
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow" title={href}>
      {children}
      <ExternalLink className={styles.outside} aria-hidden="true" />
    </a>
  );
}

/** Code inside a list or a quotation. */
function Pre({ children }: { children: ReactNode }) {
  const code = Children.toArray(children)[0];
  if (!isValidElement<{ className?: string; children?: ReactNode }>(code)) return <pre>{children}</pre>;
  const language = /language-(\S+)/.exec(code.props.className ?? "")?.[1] ?? "";
  const text = String(code.props.children ?? "").replace(/\n$/, "");
  return language.toLowerCase() === "mermaid" ? <Diagram code={text} /> : <CodeBlock code={text} language={language} />;
}
