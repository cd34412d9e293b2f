# Homebrew's formula, for a tap. The release workflow writes URL and SHA256 of the source package of the tag.
class Mlxr < Formula
  desc "Local large language models for clients of OpenAI, Ollama and Anthropic"
  url "URL"
  sha256 "SHA256"
  license "Apache-2.0"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "python@3.13"

  # Dependencies come as wheels: the formula is for a tap, where a formula need not list each of them.
  def install
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", buildpath
    bin.install_symlink libexec/"bin/mlxr"
  end

  service do
    run [opt_bin/"mlxr", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/mlxr.log"
    error_log_path var/"log/mlxr.log"
  end

  test do
    assert_match "Join two or more pathname components", shell_output("#{bin}/mlxr run demo 'What does os.path.join do?' --temperature 0")
  end
end
