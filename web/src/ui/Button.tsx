import type { ButtonHTMLAttributes, ReactNode, Ref } from "react";
import styles from "./Button.module.css";
import { Tip } from "./Tip";

interface Props extends ButtonHTMLAttributes<HTMLButtonElement> {
  kind?: "plain" | "primary" | "danger" | "quiet";
  small?: boolean;
  ref?: Ref<HTMLButtonElement>;
}

export function Button({ kind = "plain", small = false, className = "", type = "button", ...rest }: Props) {
  const classes = `${styles.button} ${styles[kind]} ${small ? styles.small : ""} ${className}`;
  return <button type={type} className={classes} {...rest} />;
}

interface IconProps extends Omit<Props, "aria-label" | "title" | "children"> {
  /** Read by screen readers and shown as the tip. */
  label: string;
  children: ReactNode;
}

/** A button that shows only an icon; its label is its tip. */
export function IconButton({ label, className = "", kind = "quiet", ...rest }: IconProps) {
  return (
    <Tip text={label}>
      <Button aria-label={label} kind={kind} className={`${styles.icon} ${className}`} {...rest} />
    </Tip>
  );
}
